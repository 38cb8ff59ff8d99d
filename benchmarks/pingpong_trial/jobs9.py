from jobs7 import crows, cdw
from jobs1 import dw as W
def ppw(name,mod,g=8): return (name,mod,"dW",dict(BLOCK_K=192,WDIV=3,BLOCK_M=32,STAGES=10,SLOTS=1,GROUP_M=g,EXPERTS=512,NARROW=False,PINGPONG=True,REGISTERS=224))
JOBS=[cdw("dW q2","q2",32,8),cdw("dW q1l","q1l",32,8),cdw("dW new","nw",32,8),cdw("dW newg1","nw",32,8,g=1),ppw("dW pp","q2"),ppw("dW ppnew","nw")]
