"""Compiles the trial's kernels, with no GPU: python benchmarks/gated_trial/build.py writes kernels.pickle beside it."""

import importlib.util
import os
import pickle
import re
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

HERE = os.path.dirname(os.path.abspath(__file__)) + "/"
sys.path.insert(0, HERE)

from functools import cache


@cache
def setup():
    from pretuned.kernels import abi, revisions

    spec = importlib.util.spec_from_file_location("pretuned.kernels.specialized_gated", HERE + "specialized_gated.py")
    m = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = m
    spec.loader.exec_module(m)
    revisions.REVISIONS["rows_gated"] = revisions.Revision(1, ("specialized_gated.py",), "")
    from pretuned.aot import compile as c

    boxes, constants = abi.boxes, abi.constants

    def gboxes(s):
        found = boxes(s)
        if isinstance(s, Gated) and not s.interleaved:
            w = list(found["w"])
            w[2 if abi._w_kn(s) else 1] //= 2
            found["w"] = tuple(w)
        return found

    def gconstants(s):
        if not isinstance(s, Gated):
            return constants(s)
        found = dict(constants(s))
        cfg = s.config
        room = (
            abi.SPECIALIZED_SHARED_BYTES
            - 512
            - 8 * abi.MAX_EXPERTS
            - cfg.num_stages * (128 + cfg.block_n) * cfg.block_k * 2
        )
        found["PARTS"] = int(os.environ.get("PARTS", 0)) or (1 if 128 * cfg.block_n <= room else 2)
        if s.registers:
            found["REGISTERS"] = s.registers
        return found | {"INTERLEAVED": s.interleaved, "ACTIVATION": 3 if s.interleaved else 0}

    abi.boxes, abi.constants = gboxes, gconstants
    return c


from pretuned.artifacts.types import DType, Fusion, Layout, Op
from pretuned.kernels.abi import Spec
from pretuned.kernels.config import Config


@dataclass(frozen=True, slots=True)
class Gated(Spec):
    interleaved: bool = False
    registers: int = 0

    @property
    def kernel(self):
        return "rows_gated"


def one(s):
    c = setup()
    try:
        r = c.compile_variant(s, 90)
        return (type(s).__name__, getattr(s, "interleaved", None), r.variant, r.cubin)
    except Exception as e:
        return (type(s).__name__, getattr(s, "interleaved", None), str(s), str(e)[:1500])


def act(oai):

    import triton

    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
    from act_kernel import act as f
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    src = ASTSource(
        f,
        {"h": "*bf16", "y": "*bf16", "total": "i64", "I": "i32", "OAI": "constexpr", "BLOCK": "constexpr"},
        {"OAI": oai, "BLOCK": 1024},
        {
            (0,): [["tt.divisibility", 16]],
            (1,): [["tt.divisibility", 16]],
            (3,): [["tt.divisibility", 16]],
            (2,): [["tt.divisibility", 16]],
        },
    )
    k = triton.compile(src, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "enable_fp_fusion": True})
    print("act", oai, sorted(set(re.findall(r"(?:ld|st)\.global\S*", k.asm["ptx"]))), k.metadata.shared)
    return bytes(k.asm["cubin"]), k.metadata.name, k.metadata.shared


def cfg(row, specialized=False, persistent=True, g=8):
    return Config(*row, group_m=g, tma=True, persistent=persistent, specialized=specialized)


SP = [(128, 256, 64, 8, 4), (128, 256, 64, 8, 3), (128, 128, 64, 8, 6), (128, 128, 64, 8, 5)]
PE = [
    (64, 128, 128, 4, 4),
    (64, 256, 64, 4, 4),
    (128, 256, 64, 8, 3),
    (32, 128, 128, 4, 3),
    (16, 256, 128, 4, 3),
    (16, 128, 256, 8, 3),
]
TI = [(16, 128, 128, 4, 3), (32, 128, 128, 4, 3), (64, 128, 64, 4, 6), (16, 64, 128, 4, 4)]


def specs():
    out = []
    for layout, inter in ((Layout.NK, False), (Layout.KN, True)):
        gated = [cfg(r, True) for r in SP] + [cfg(SP[1], True, g=32), cfg(SP[0], True, g=32)]
        out += [Gated(Op.FORWARD, DType.BF16, c, layout, Fusion.GATHER, interleaved=inter) for c in gated]
        out += (
            [Gated(Op.FORWARD, DType.BF16, c, layout, Fusion.NONE, interleaved=inter) for c in gated[:3]]
            if not inter
            else []
        )
        base = (
            [cfg(r, True) for r in SP]
            + [cfg(SP[0], True, g=32)]
            + [cfg(r) for r in PE]
            + [cfg(r, persistent=False) for r in TI]
        )
        out += [Spec(Op.FORWARD, DType.BF16, c, layout, Fusion.GATHER) for c in base]
        out += [Spec(Op.FORWARD, DType.BF16, c, layout, Fusion.NONE) for c in base[:7]] if not inter else []
    return out


if __name__ == "__main__":
    todo = specs()
    with ProcessPoolExecutor(2) as pool:
        acts = list(pool.map(act, [False, True]))
        done = list(pool.map(one, todo))
    for d in done:
        if isinstance(d[2], str):
            print("FAILED", d)
        elif dict(d[2].config).get("specialized"):
            print(
                d[0],
                d[1],
                dict(d[2].config)["block_n"],
                dict(d[2].config)["num_stages"],
                d[2].fusion,
                "regs",
                d[2].registers,
                "spill",
                d[2].spill_bytes,
                "shared",
                d[2].shared_bytes,
            )
    pickle.dump((acts, [d for d in done if not isinstance(d[2], str)]), open(HERE + "kernels.pickle", "wb"))
    print(len(done), os.path.getsize(HERE + "kernels.pickle"))
