"""Numbers as a person reads them."""

import math


def compact_number(value: float) -> str:
    """About three significant digits in at most eight characters: 0.123, 12.3, 4.56k, 1.2e-05."""
    value = float(value)
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:  # 999.6 would round to 1e+03
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}" if abs(value) >= 1e-3 else f"{value:.1e}"


def compact_duration(seconds: float) -> str:
    """Seconds as 12s, 3m05s or 1h02m."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"


def number_or_none(value: float | None) -> str:
    return "none" if value is None else compact_number(value)
