"""Numbers as people read them."""


def readable(value: float, decimals: int = 3, sign: str = "") -> str:
    """`0.734`, and small numbers with as many digits that count: `0.00123`, `2.5e-07`."""
    small = value != 0 and abs(value) < 0.1
    return f"{value:{sign}.{decimals}{'g' if small else 'f'}}"
