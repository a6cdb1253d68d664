"""Kinds of values that fields have in common: tables, options, intervals, temperatures."""

import math
from collections.abc import MutableMapping
from typing import Annotated, Any, TypeVar

from grpo.config.bounds import Above, AtLeast, Below

Value = TypeVar("Value")
# A dict from names. Not written dict, of which tyro makes one flag per name of the recipe's, so that a command line
# could not give other names; this way it is `--field NAME VALUE NAME VALUE ...`, which replaces the recipe's.
Table = MutableMapping[str, Value]
# What a table may hold whose names belong to a library: booleans stay booleans (`false` on the command line).
Scalar = bool | int | float | str
# What a table may hold whose values a library reads: whatever JSON can say; a word that is no JSON is text.
Json = bool | int | float | str | list | dict | None
# Keyword arguments of one function; one JSON object on the command line.
Options = dict[str, Any]
# Every so many steps, never at 0.
Interval = Annotated[int, AtLeast(0, "0 turns it off")]
Temperature = Annotated[float, Above(0, "greedy samples cannot be compared"), Below(math.inf)]
