
from jobs9 import rows as r9, dw as d9
from jobs5 import p
def rows(*a, **k): return r9(*a, **({"BLOCK_ROWS": 64} | k))
JOBS=[r9("fwd v10", 256, 4, False, "v10"), rows("fwd v11 s5", 256, 5, False, "v11", SLOTS=1), rows("fwd v11 s4", 256, 4, False, "v11"), p("fwd plain 64x256", "p3", 64,256,64,4,4,pers=True), p("fwd plain 128x256", "p3", 128,256,64,8,3,pers=True),
 r9("dX v10", 256, 4, True, "v10"), rows("dX v11 s5", 256, 5, True, "v11", SLOTS=1), d9("dW v10", 32, 8, "v10"), d9("dW v11 s10", 32, 10, "v11", BLOCK_ROWS=64, SLOTS=1), d9("dW v11 64 s5", 64, 5, "v11", BLOCK_ROWS=64, SLOTS=1)]
