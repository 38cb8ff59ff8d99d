# ruff: noqa
"""``aot`` with the cells of REDO (seed.py) measured in pingpong, the model's choice and the two best others."""

import json
import os

import pretuned.aot.lanes as lanes
from pretuned.aot.__main__ import main
from pretuned.aot.records import problem_value

REDO = {cell: set(best) for cell, best in json.load(open(os.environ["REDO"])).items()}


def narrowed(self, trial):
    best = REDO.get(json.dumps([problem_value(trial.problem), trial.bucket]))
    if best is None:
        return usual(self, trial)
    ranked = [i for _, i in self.ground.ranked(trial.problem, trial.bucket, self.failed)]
    variants = [self.bundle.variant(i) for i in ranked]
    return tuple(
        i
        for place, (i, one) in enumerate(zip(ranked, variants))
        if not place or dict(one.config)["pingpong"] or one.cubin_sha256.hex() in best
    )


(owner,) = (one for one in vars(lanes).values() if isinstance(one, type) and "_contenders" in vars(one))
usual = owner._contenders
owner._contenders = narrowed
if __name__ == "__main__":
    main()
