"""The guides' way to start a run: `python driver.py --config_file configs/bert_4vpipe.yml`.

It is `vpipe train configs/bert_4vpipe.yml`; further options are those of `vpipe train`.
"""

import argparse
import sys

from vpipe.cli import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, add_help=False, allow_abbrev=False)
    parser.add_argument("--config_file")
    given, others = parser.parse_known_args()
    named = [] if given.config_file is None else [given.config_file]
    sys.argv = ["vpipe", "train", *named, *others]
    main()
