/* Which kernels there are, and which of them this CPU runs. The choice itself is Python's. */
#include "fastmha.h"

extern const fmha_kernels fmha_baseline_kernels_32, fmha_baseline_kernels_64;

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
extern const fmha_kernels fmha_avx2_kernels_32, fmha_avx2_kernels_64, fmha_avx512_kernels_32, fmha_avx512_kernels_64;

int fmha_isa_runs(fmha_isa isa)
{
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (isa == FMHA_AVX2) return avx2;
    if (isa == FMHA_AVX512)
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl")
               && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
    return isa == FMHA_BASELINE;
}

const fmha_kernels *fmha_kernels_of(fmha_isa isa, int is_double)
{
    if (isa == FMHA_AVX2) return is_double ? &fmha_avx2_kernels_64 : &fmha_avx2_kernels_32;
    if (isa == FMHA_AVX512) return is_double ? &fmha_avx512_kernels_64 : &fmha_avx512_kernels_32;
    return is_double ? &fmha_baseline_kernels_64 : &fmha_baseline_kernels_32;
}
#else
int fmha_isa_runs(fmha_isa isa) { return isa == FMHA_BASELINE; }

const fmha_kernels *fmha_kernels_of(fmha_isa isa, int is_double)
{
    if (isa != FMHA_BASELINE) return NULL;
    return is_double ? &fmha_baseline_kernels_64 : &fmha_baseline_kernels_32;
}
#endif

const char *fmha_isa_name(fmha_isa isa)
{
    static const char *const names[FMHA_ISA_COUNT] = {"baseline", "avx2", "avx512"};
    return names[isa];
}
