"""Who answers for a calibration: a signature over its digest."""

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
    """`calibration`: SHA-256 of the calibration object without its signature; `made_at` in Unix
    seconds."""

    CONTRACT: ClassVar[ContractName] = "slasher"
    calibration: DigestField
    made_at: U64


class CalibrationSignature(Strict):
    """A CalibrationStatement's signature, as it stands in the object that it is about."""

    made_at: U64
    signer: AddressField
    signature: SignatureField
