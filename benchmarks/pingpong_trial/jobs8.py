from jobs7 import crows, cdw
from jobs1 import rows as R, dw as W
JOBS=[f for q in ("q2","q1","q2l","q1l") for f in (cdw("dW "+q,q,32,8),cdw("dW g1"+q,q,32,8,g=1))]+[f for q in ("q2","q1") for f in (crows("fwd "+q,q,256,4,False),crows("fwd 128"+q,q,128,6,False,1))]
JOBS+=[W("dW pp",3,10,32,reg=224),W("dW ppg1",3,10,32,reg=224,g=1)]
