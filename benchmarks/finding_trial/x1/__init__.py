from .forward import rows
from .grad_weight import weight
