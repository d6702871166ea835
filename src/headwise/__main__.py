"""``python -m headwise``: the same as the command ``headwise``."""

import sys

if __name__ == "__main__":
    try:
        from headwise.cli import main
    except KeyboardInterrupt:  # while torch was being imported
        sys.exit(130)
    main()
