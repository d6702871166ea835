"""``python -m headwise``: the same as the command ``headwise``."""

import os

if __name__ == "__main__":
    try:
        from headwise.cli import main

        main()
    except KeyboardInterrupt:  # before, or after, the command line could see to it
        os._exit(130)
