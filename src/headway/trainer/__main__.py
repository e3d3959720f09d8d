"""`python -m headway.trainer`: the reference trainer as a process."""

import sys

from headway.trainer.reference import main

sys.exit(main())
