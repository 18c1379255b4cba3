"""specmill: does speculative decoding pay for this model on this hardware?"""

import os
import sys

if not sys.stderr.isatty():
    # In a log file a progress bar is a line now and then, not thousands of redraws. tqdm reads
    # this when it is first imported, which is after this module.
    os.environ.setdefault("TQDM_MININTERVAL", "20")
