# ruff: noqa
"""spec.py: real Specs -> harness dicts. jobs: (name, op, config text dict, fusion, layout kn?, extra rewrites, const)"""

import sys, os, pickle, importlib, multiprocessing as mp

sys.path.insert(0, ".")
os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")


def one(job):
    name, op, cfg, fusion, extra, const = job
    from pretuned.aot import compile as C
    from pretuned.kernels.abi import Spec
    from pretuned.kernels.config import Config
    from pretuned.artifacts.types import Op, DType, Layout, Fusion

    old = C.__dict__.setdefault("_orig", C.rewrites)
    C.rewrites = lambda c: old(c) + tuple(importlib.import_module(m).__dict__[f](*a) for m, f, a in extra)
    c = Config(**cfg)
    o = {"forward": Op.FORWARD, "dX": Op.DX, "dW": Op.DW}[op]
    s = Spec(op=o, dtype=DType.BF16, layout=Layout.NK, config=c, fusion=Fusion(fusion), alignment=16, max_experts=512)
    try:
        v = C.compile_variant(s, 90)
    except Exception as e:
        return name, None, f"{type(e).__name__} {str(e)[:1500]}"
    V = v.variant
    kinds = [(n, "desc" if k.startswith("desc") else k) for n, k in V.arguments]
    maps = {m.argument if hasattr(m, "argument") else m.name: m for m in V.tensor_maps}
    meta = [dict(block_size=list(maps[n].box), swizzle=maps[n].swizzle) for n, k in V.arguments if k.startswith("desc")]
    const = (
        dict(
            BLOCK_N=c.block_n,
            BLOCK_K=c.block_k,
            BLOCK_ROWS=c.block_m,
            PLAIN=True,
            PERSISTENT=c.persistent,
            BLOCK_M=c.block_m,
        )
        | const
    )
    return (
        name,
        dict(
            name=name,
            op=op,
            cubin=v.cubin,
            entry=V.entry,
            args=kinds,
            meta=meta,
            threads=V.threads,
            shared=V.shared_bytes,
            const=const,
            cluster=1,
        ),
        f"regs {V.registers} spill {V.spill_bytes} cubin {len(v.cubin)} shared {V.shared_bytes}",
    )


if __name__ == "__main__":
    jobs = importlib.import_module(sys.argv[1]).JOBS
    with mp.get_context("spawn").Pool(2, maxtasksperchild=8) as pool:
        out = []
        for name, v, text in pool.imap(one, jobs):
            print(name, text, flush=True)
            if v:
                out.append(v)
    pickle.dump(out, open(sys.argv[2], "wb"))
