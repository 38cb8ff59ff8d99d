from jobs3 import rows, dw
JOBS = []
for kn, o in ((False, "fwd"), (True, "dX")):
    JOBS += [rows(f"{o} 256 s4 2x64", 256, 64, 4, kn), rows(f"{o} C3 256 s3 2x64", 256, 64, 3, kn, C=3), rows(f"{o} C3 256 s3 1x64", 256, 64, 3, kn, C=3, slots=1), rows(f"{o} C3 256 s3 2x64 g4", 256, 64, 3, kn, C=3, GROUP_M=4)]
JOBS += [dw("dW 32 s8 2x64", 32, 256, 8), dw("dW C3 32 s6 2x64", 32, 256, 6, C=3), dw("dW C3 32 s7 1x64", 32, 256, 7, C=3, slots=1), dw("dW C3 64 s3 2x64", 64, 256, 3, C=3)]
