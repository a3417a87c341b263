// All that is done with states once there are some: merging, finishing, and their rows on the wire.

#include "merge.cu"
#include "wire.cu"
