"""`python -m megatron_lite <verb> ...`, the same as `megatron-lite <verb> ...`."""

import sys

from megatron_lite.cli.main import main

if __name__ == "__main__":  # a verb may start processes, which import this file under another name
    sys.exit(main())
