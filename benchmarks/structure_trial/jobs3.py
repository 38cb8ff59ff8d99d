from jobs1 import rows as r0, dw as d0
def rows(name, BN, BK, S, kn, C=2, regs=None, slots=2, width=64, **kw): return r0(name, "v3", BN, BK, S, kn, slots=slots, width=width, CONSUMERS=C, INSTR_N=kw.pop("IN", None) or (256 if C == 2 else 128), BLOCK_ROWS=64*C, **({"REGISTERS": regs or (216 if C==2 else 160)} | kw))
def dw(name, BM, BK, S, C=2, regs=None, slots=2, width=64, **kw): return d0(name, "v3", BM, BK, S, slots=slots, width=width, CONSUMERS=C, INSTR_N=kw.pop("IN", None) or (256 if C == 2 else 128), BLOCK_ROWS=64*C, **({"REGISTERS": regs or (216 if C==2 else 160)} | kw))

JOBS = [rows("fwd v3 256 s4 2x64", 256, 64, 4, False), rows("fwd v3 256 s4 2x64 n128", 256, 64, 4, False, IN=128)] + [rows(f"fwd v3 C3 256 s3 2x64 r{r}", 256, 64, 3, False, C=3, regs=r) for r in (144,152,160)]
JOBS += [dw("dW v3 32 s8 2x64", 32, 256, 8)] + [dw(f"dW v3 C3 32 s6 2x64 r{r}", 32, 256, 6, C=3, regs=r) for r in (144, 152,160)]
