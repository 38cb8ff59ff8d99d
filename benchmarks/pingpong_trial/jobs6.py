from jobs1 import rows as R, dw as W
from jobs3 import crows, cdw
JOBS=[cdw("dW k32",32,8), cdw("dW k32s6x4",32,6,slots=4), cdw("dW k32s5x4",32,5,slots=4),cdw("dW k32s4x4",32,4,slots=4),cdw("dW k32s3x4",32,3,slots=4),cdw("dW k32s3x8",32,3,slots=8), cdw("dW k32s6x2",32,6,slots=2),
 W("dW pp",3,10,32,reg=224), W("dW pps6x3",3,6,32,reg=224,slots=3), W("dW pps6x6",3,6,32,reg=224,slots=6), W("dW pps4x6",3,4,32,reg=224,slots=6)]
