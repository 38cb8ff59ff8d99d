# ruff: noqa
import re

PROD = re.compile(r"\twgmma\.mma_async([\w.]*?)m64n256(k\d+[\w.]*\s*)\{([^{}]*)\}([^;]*);")
MARK = re.compile(r"mov\.b32 (%r\d+), (%r\d+); // products of %r\d+ x \d+ rows")


def pred(sizes):
    def f(ptx):
        marks = MARK.findall(ptx)
        assert marks, "no marks"

        def one(m):
            sums = m[3].split(",")
            assert len(sums) == 128
            return "\n".join(
                f"\t@%fit{k} wgmma.mma_async{m[1]}m64n{32 * k}{m[2]}{{{','.join(sums[: 16 * k])}}}{m[4]};"
                for k in range(1, sizes + 1)
            )

        n = len(PROD.findall(ptx))
        ptx = PROD.sub(one, ptx)
        ptx = MARK.sub(
            lambda m: (
                m[0] + "\n" + "\n".join(f"\tsetp.eq.s32 %fit{k}, {m[2]}, {k};" for k in range(1, sizes + 1)) + "\n"
            ),
            ptx,
        )
        body = ptx.index("{", ptx.index(".entry"))
        ptx = ptx[: body + 1] + f"\n\t.reg .pred %fit<{sizes + 1}>;" + ptx[body + 1 :]
        assert n == ptx.count("wgmma.mma_async") / sizes, (n, ptx.count("wgmma.mma_async"))
        open("./pred.ptx", "w").write(ptx)
        return ptx

    f.__name__ = f"pred{sizes}"
    return f


def branch(sizes):
    """one switch a step: blocks of products"""

    def f(ptx):
        # the run of products: from the first product after a mark to the last before commit
        out, at, n = [], 0, 0
        for mk in MARK.finditer(ptx):
            first = PROD.search(ptx, mk.end())
            end = ptx.index("wgmma.commit_group", first.start())
            run = ptx[first.start() : end].rstrip() + "\n"
            out.append(ptx[at : first.start()])
            n += 1
            text = "".join(
                f"\tsetp.eq.s32 %fit{k}, {mk[2]}, {k};\n\t@%fit{k} bra.uni $FIT{n}_{k};\n" for k in range(1, sizes)
            )
            for k in [sizes] + list(range(1, sizes)):
                cutrun = PROD.sub(
                    lambda m: (
                        f"\twgmma.mma_async{m[1]}m64n{32 * k}{m[2]}{{{','.join(m[3].split(',')[: 16 * k])}}}{m[4]};"
                    ),
                    run,
                )
                text += (f"$FIT{n}_{k}:\n" if k != sizes else "") + cutrun + f"\tbra.uni $FIT{n}_end;\n"
            text += f"$FIT{n}_end:\n\t"
            out.append(text)
            at = end
        out.append(ptx[at:])
        ptx = "".join(out)
        body = ptx.index("{", ptx.index(".entry"))
        ptx = ptx[: body + 1] + f"\n\t.reg .pred %fit<{sizes + 1}>;" + ptx[body + 1 :]
        open("./branch.ptx", "w").write(ptx)
        return ptx

    f.__name__ = f"branch{sizes}"
    return f


LOOP = re.compile(r"^(\$L__BB\d+_\d+):", re.MULTILINE)


def unswitch(sizes, grain=32):
    """the loop of products once for each size"""

    def f(ptx):
        out, at, n = [], 0, 0
        for mk in MARK.finditer(ptx):
            heads = [m for m in LOOP.finditer(ptx, 0, mk.start())]
            head = heads[-1]
            back = re.compile(r"^\s*@!?%p\d+ bra(\.uni)?\s+" + re.escape(head[1]) + r";[^\n]*\n", re.M).search(
                ptx, mk.end()
            )
            assert back, head[1]
            assert not LOOP.search(ptx, mk.end(), back.start())
            n += 1
            body = ptx[head.end() : back.end()].split("\n", 1)[1]
            out.append(ptx[at : head.start()])
            text = f"{head[0]}\n"
            text += "".join(
                f"\tsetp.eq.s32 %fit{k}, {mk[2]}, {k};\n\t@%fit{k} bra $FIT{n}_{k};\n" for k in range(1, sizes)
            )
            for k in [sizes] + list(range(1, sizes)):
                mine = PROD.sub(
                    lambda m: (
                        f"\twgmma.mma_async{m[1]}m64n{grain * k}{m[2]}{{{','.join(m[3].split(',')[: grain * k // 2])}}}{m[4]};"
                    ),
                    body,
                ).replace(head[1] + ";", f"$FIT{n}_{k};")
                text += f"$FIT{n}_{k}:\n{mine}\tbra.uni $FIT{n}_end;\n"
            text += f"$FIT{n}_end:\n"
            out.append(text)
            at = back.end()
        out.append(ptx[at:])
        ptx = "".join(out)
        body = ptx.index("{", ptx.index(".entry"))
        ptx = ptx[: body + 1] + f"\n\t.reg .pred %fit<{sizes + 1}>;" + ptx[body + 1 :]
        open("./unswitch.ptx", "w").write(ptx)
        return ptx

    f.__name__ = f"unswitch{sizes}_{grain}"
    return f
