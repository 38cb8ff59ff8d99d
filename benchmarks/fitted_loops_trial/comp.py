# ruff: noqa
"""comp.py jobsmodule out.pkl"""

import sys, os, pickle, importlib, tempfile, re, subprocess, multiprocessing as mp

os.environ.update(TRITON_DISABLE_LINE_INFO="1", TRITON_ALWAYS_COMPILE="1")
sys.path.insert(0, ".")
SH = "NVMMASharedLayout(swizzle_byte_width={sw}, element_bitwidth=16, rank={rank}, transposed=False, fp4_padded=False, cga_layout=[])"


def desc(box, sw=128):
    return f"tensordesc<bf16[{','.join(map(str, box))}],{SH.format(rank=len(box), sw=sw)}>"


I32, I64 = "i32", "i64"


def rows_args(c):
    kn, BK, wc = c["W_KN"], c["BLOCK_K"], c["WCOLS"]
    a = [
        ("x", "*bf16" if c.get("GATHER") else desc((64, BK))),
        ("w", desc((1, BK, wc) if kn else (1, wc, BK))),
        ("y", "*bf16"),
    ]
    a += [("y_map", desc((1, 1, 64, 64)))] if c["YMAP"] else []
    a += [("m_sizes", "*i32"), ("index", "*i32"), ("row_weights", "*fp32"), ("bias", "*bf16"), ("counter", "*i32")]
    a += [(n, I32) for n in ("M", "N", "K", "E")] + [
        (n, I64) for n in ("stride_x_m", "stride_w_e", "stride_w_row", "stride_y_m")
    ]
    a += [(n, I32) for n in ("m_sizes_step", "index_step", "index_end", "x_divisor", "flags")]
    return a


def div(args):
    d = {}
    for n, k in args:
        if n in ("x", "w", "y") and k.startswith("*"):
            d[n] = 16
        elif n in ("N", "K") or k == I64:
            d[n] = 8
    return d


def one(job):
    name, mod, fname, op, c = job
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource
    from pretuned.aot import rewriting as R

    fn = getattr(importlib.import_module(mod), fname)
    args = rows_args(c)
    kinds = dict(args)
    with tempfile.TemporaryDirectory() as t:
        os.environ["TRITON_CACHE_DIR"] = t
        extra = {k: v for k, v in c.items() if k in fn.arg_names} | ({} if c["YMAP"] else {"y_map": None})
        src = GluonASTSource(
            fn,
            {n: kinds.get(n, "constexpr") for n in fn.arg_names},
            extra,
            {(list(fn.arg_names).index(n),): [["tt.divisibility", b]] for n, b in div(args).items()},
        )
        import pred as P

        how = (
            {"fit": (R.fit,), "cut": (R.cut,), None: ()}[c["RW"]]
            if not isinstance(c.get("RW"), tuple)
            else (getattr(P, c["RW"][0])(*c["RW"][1:]),)
        )
        try:
            with R.rewriting(how):
                k = triton.compile(src, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 1})
        except Exception as e:
            while e.__cause__ is not None:
                e = e.__cause__
            return name, None, f"{type(e).__name__} {str(e)[:1500]}"
        cubin = bytes(k.asm["cubin"])
        if os.environ.get("PTX"):
            open(os.environ["PTX"], "w").write(k.asm["ptx"])
        open(t + "/a.cubin", "wb").write(cubin)
        tool = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/cuobjdump")
        d = subprocess.run([tool, "--dump-resource-usage", t + "/a.cubin"], capture_output=True, text=True).stdout
        r = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", d)
        threads = int(re.search(r"^\.reqntid (\d+)", k.asm["ptx"], re.M)[1])
        return (
            name,
            dict(
                name=name,
                op=op,
                cubin=cubin,
                entry=k.metadata.name,
                args=[
                    (n, "desc" if kk.startswith("tensordesc") else "ptr" if kk.startswith("*") else kk)
                    for n, kk in args
                ],
                meta=[dict(m) for m in (k.metadata.tensordesc_meta or ())],
                threads=threads,
                shared=k.metadata.shared,
                const=c,
                cluster=1,
            ),
            f"regs {r[1]} stack {r[2]} local {r[3]} shared {k.metadata.shared} threads {threads} cubin {len(cubin)}",
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
