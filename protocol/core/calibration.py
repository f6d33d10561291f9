"""Who measured a calibration: a signature over its digest."""

from __future__ import annotations

from typing import ClassVar

from protocol.core.signing import (
    U64,
    AddressField,
    ContractName,
    DigestField,
    SignatureField,
    Statement,
    Strict,
)


class CalibrationStatement(Statement):
    """`calibration`: SHA-256 of the calibration object; `made_at` in Unix seconds."""

    CONTRACT: ClassVar[ContractName] = "slasher"
    calibration: DigestField
    made_at: U64


class SignedCalibration(Strict):
    """The signature as published beside the object."""

    statement: CalibrationStatement
    signer: AddressField
    signature: SignatureField
