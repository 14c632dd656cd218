"""Calls that no signal comes between."""

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

# Python looks for signals between its own instructions only, and in `at_once(map(call, calls))`
# there are none: a deque makes the calls, of functions that are written in C themselves.
at_once: Callable[[Iterable[object]], None] = deque[object](maxlen=0).extend
call: Callable[[partial[Any]], object] = partial.__call__
