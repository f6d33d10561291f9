"""The signature over a calibration's digest, which makes its signer accountable."""

from __future__ import annotations

from typing import ClassVar

from prime_core.signing import (
    U64,
    AddressField,
    ContractName,
    DigestField,
    SignatureField,
    Statement,
    Strict,
)


class CalibrationStatement(Statement):
    """`calibration` is the SHA-256 of the calibration object without its signature; `made_at` is in
    Unix seconds."""

    CONTRACT: ClassVar[ContractName] = "slasher"
    calibration: DigestField
    made_at: U64


class CalibrationSignature(Strict):
    """A CalibrationStatement's signature, embedded in the calibration object it covers."""

    made_at: U64
    signer: AddressField
    signature: SignatureField
