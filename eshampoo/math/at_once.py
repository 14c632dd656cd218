"""Calls that no signal can come between."""

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

# Python handles signals only between its own instructions, and `at_once(map(call, calls))` runs
# none: a deque makes the calls, and the functions that it calls are written in C too.
at_once: Callable[[Iterable[object]], None] = deque[object](maxlen=0).extend
call: Callable[[partial[Any]], object] = partial.__call__
