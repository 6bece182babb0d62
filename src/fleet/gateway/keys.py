"""Proving and checking a key."""
from __future__ import annotations

import hashlib
import hmac

from fleet.config.address import plain_address, show_host


def prove_key(key: str, nonce: str, address: str, port: int) -> str:
    """Return the proof that its maker knows the key: an HMAC over a nonce, in hexadecimal.

    The address where the gateway was reached is part of it. So a program on another port
    cannot pass the nonce on to a real gateway: that proof would name the real one's port.
    """
    place = f"{show_host(plain_address(address))}:{port}"
    message = f"subagent-fleet{nonce}{place}".encode("ascii")
    return hmac.new(key.encode("utf-8"), message, hashlib.sha256).hexdigest()


def proves_key(proof: object, wanted: str) -> bool:
    """Tell whether a proof is the wanted one, in constant time."""
    return hmac.compare_digest(str(proof).encode("utf-8"), wanted.encode("utf-8"))
