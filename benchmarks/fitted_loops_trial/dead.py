# ruff: noqa
import re


def dead(n, stack=0):
    def f(ptx):
        m = re.search(r"\.entry (\w+)\(", ptx)
        params = re.findall(r"\.param \.(u\d+|b\d+|s\d+|align \d+ \.b8|u64 \.ptr[^\n]*?|u32)\s+(\w+)", ptx)
        i32 = [n_ for t, n_ in re.findall(r"\.param \.(u32|b32|s32) (\w+)", ptx)]
        body = ptx.index("{", ptx.index(".entry"))
        at = re.compile(r"\{\n(\s*\.(reg|loc|shared)[^\n]*\n)+").search(ptx, body).end()
        head = "\t.reg .pred %dp; .reg .b32 %dt; .reg .f32 %df; .reg .b64 %da;\n"
        if stack:
            head += f"\t.local .align 16 .b8 dstk[{stack}];\n"
        head += f"\tld.param.b32 %dt, [{i32[0]}]; setp.eq.s32 %dp, %dt, -1; @%dp bra $DEAD;\n"
        end = ptx.rindex("}")
        tail = "$DEAD:\n\tmov.f32 %df, 0f3F800000;\n"
        tail += "".join(f"\tfma.rn.f32 %df, %df, %df, 0f3F{i:06X};\n" for i in range(n))
        if stack:
            tail += "\tmov.b64 %da, dstk; cvt.u64.u32 %da, %dt; .reg .b64 %dl; mov.b64 %dl, dstk; add.s64 %dl, %dl, %da; st.local.f32 [%dl], %df; ld.local.f32 %df, [%dl+4];\n"
        tail += "\tcvt.u64.u32 %da, %dt; st.global.f32 [%da], %df;\n\tret;\n"
        return ptx[:at] + head + ptx[at:end] + tail + ptx[end:]

    f.__name__ = f"dead{n}_{stack}"
    return f
