"""Where the package of an extra comes from: no index has Penstock."""


def installing(extra: str) -> str:
    """The remedy for a missing package of this extra."""
    return (
        f"install the extra `{extra}`: pip install '.[{extra}]' in a checkout of Penstock, or from the wheel "
        "that `make wheels` builds"
    )
