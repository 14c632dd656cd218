"""``python -m eshampoo.lab`` is the console command ``eshampoo``."""

import sys

from eshampoo.lab.cli import main

if __name__ == "__main__":
    sys.exit(main())
