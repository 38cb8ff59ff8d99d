from jobs1 import rows as R, dw as W
from jobs3 import crows, cdw
JOBS=[cdw("dW k32",32,8), cdw("dW narrow",32,8,slots=1,narrow=True), cdw("dW k64",64,4), W("dW pp192",3,5,reg=224), W("dW pp192sk",3,5,reg=224,skip=True),W("dW pp192b32",3,10,32,reg=224), W("dW pp192b32g1",3,10,32,reg=224,g=1), W("dW pp192b32sk",3,10,32,reg=224,skip=True), W("dW pp192b32s8sk",3,8,32,reg=224,slots=3,skip=True), W("dW pp128",2,6,slots=2,reg=216), W("dW pp128b32",2,12,32,slots=2,reg=216),
crows("fwd s4",256,4,False),crows("fwd 128",128,6,False,1),R("fwd pp192",3,5,False,reg=224), R("fwd pp192sk",3,5,False,reg=224,skip=True), R("fwd pp128",2,6,False,reg=216,skip=True,slots=2),
crows("dX s4",256,4,True), R("dX pp192",3,5,True,reg=224), R("dX pp192sk",3,5,True,reg=224,skip=True),R("dX pp128",2,6,True,reg=216,skip=True,slots=2),
]
