"""Proving and checking a key."""
from __future__ import annotations

import hashlib
import hmac

from fleet.config.address import plain_address, show_host


def prove_key(key: str, nonce: str, address: str, port: int) -> str:
    """Return what only who knows the key can say to a nonce, in hexadecimal.

    It names where the gateway was reached. Who holds another port and hands the nonce on to a
    gateway that knows the key gets a proof for that one's port, which is none for its own.
    """
    place = f"{show_host(plain_address(address))}:{port}"
    message = f"subagent-fleet{nonce}{place}".encode("ascii")
    return hmac.new(key.encode("utf-8"), message, hashlib.sha256).hexdigest()


def proves_key(proof: object, wanted: str) -> bool:
    """Tell whether a proof is the wanted one, in a time that tells nothing."""
    return hmac.compare_digest(str(proof).encode("utf-8"), wanted.encode("utf-8"))
