"""All of it under one name, until nobody imports it."""

from beside_oracles import *  # noqa: F403
from keyword_table import *  # noqa: F403
from matrices import *  # noqa: F403
from training import *  # noqa: F403
