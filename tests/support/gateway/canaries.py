"""Canary strings: random texts that stand for secrets, and the search for them."""

import base64
import os


def new_canary(n: int = 0) -> str:
    return f"canary{n:02d}x{os.urandom(9).hex()}"


def written(canary: str) -> list[bytes]:
    """As it is, in hexadecimal, and at each place of a base64 text."""
    raw = canary.encode()
    inside = [base64.b64encode(b"\0" * shift + raw)[4 * (shift > 0) : -4] for shift in range(3)]
    return [raw, raw.hex().encode(), *inside]


def found_in(text: bytes, canaries: list[str]) -> list[str]:
    """Those of the canaries that the text holds in any of these forms."""
    return [canary for canary in canaries if any(form in text for form in written(canary))]
