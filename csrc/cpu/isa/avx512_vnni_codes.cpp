// The rest of avx512_vnni.cpp: in one file the two take twice as long to compile, and 5 GB of memory.
#include "../kernels/quantized/gemm_quantized.h"

namespace qr {

void fill_avx512_vnni_codes(Kernels& kernels) { fill_codes<ByVectors>(kernels); }

}  // namespace qr
