"""`python -m megatron_lite <verb> ...`, the same as `megatron-lite <verb> ...`."""

import sys

from megatron_lite.cli.main import main

sys.exit(main())
