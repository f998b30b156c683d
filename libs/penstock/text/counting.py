"""A number with its noun, in the singular or the plural."""


def count(number: int, noun: str) -> str:
    """`1 GPU`, `1,024 GPUs`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
