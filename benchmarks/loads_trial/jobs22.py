from jobs20 import cdw, pdw
JOBS=[cdw("dW k32","now",32,8), pdw("dW pp","now"), cdw("dW pg0","pg",32,8,AHEAD=0), cdw("dW pg1","pg",32,8,AHEAD=1), cdw("dW pg4","pg",32,8,AHEAD=4), pdw("dW ppg1","pg",AHEAD=1), cdw("dW k32late","now",32,8,g=1)]
