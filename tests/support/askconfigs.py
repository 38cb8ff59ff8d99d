"""One process that asks for a layer's configs: ``askconfigs.py LOG SECONDS [WAIT_S] [force]``; prints what it got."""

from __future__ import annotations

import sys
from pathlib import Path

import fakemeasure

from pretuned.aot.demand import api, tuner


def main() -> None:
    log, seconds, wait_s, force = (*sys.argv[1:], *("", "", "")[: 5 - len(sys.argv)])
    if wait_s:
        tuner.WAIT_S = float(wait_s)
    key = api.key_for(fakemeasure.ON_H200, 8, 256, 128, 2, "bf16", 64)
    configs = fakemeasure.on_demand(Path(log), float(seconds)).configs(key, 0, force=bool(force))
    print([(pair.op.value, str(pair.first.config), str(pair.second.config)) for pair in configs])


if __name__ == "__main__":
    main()
