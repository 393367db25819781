/* Which kernels there are, and which of them this CPU runs. The choice itself is Python's. */
#include "fastmha.h"

/* FMHA_BASELINE_ALONE: as on a machine for which there are no other kernels. */
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__)) && !defined(FMHA_BASELINE_ALONE)
#define FMHA_X86
#include <cpuid.h>
#endif
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <string.h>

extern const fmha_kernels fmha_baseline_kernels_32, fmha_baseline_kernels_64;

int fmha_cpu_fetches = 0;

#if defined(__GNUC__) || defined(__clang__)
extern const fmha_kernels fmha_amx_emulated_tile_kernels_32;

/* The kernels of an instruction set and those on matrix tiles, as one table. */
static const fmha_kernels *with_tiles(const char *name, const fmha_kernels *vectors, const fmha_kernels *tiles, fmha_kernels *both)
{
    fmha_kernels all = *vectors;
    all.name = name;
    all.matrix_head = tiles->matrix_head;
    all.matrix_pack = tiles->matrix_pack;
    all.matrix_bytes = tiles->matrix_bytes;
    all.matrix_cut = tiles->matrix_cut;
    all.matrix_forward = tiles->matrix_forward;
    all.matrix_scratch = tiles->matrix_scratch;
    all.gradient_pack_keys = tiles->gradient_pack_keys;
    all.gradient_pack_rows = tiles->gradient_pack_rows;
    all.gradient_bytes = tiles->gradient_bytes;
    all.matrix_backward = tiles->matrix_backward;
    all.gradient_scratch = tiles->gradient_scratch;
    all.gradient_kept = tiles->gradient_kept;
    all.gradient_sums = tiles->gradient_sums;
    all.gradient_add = tiles->gradient_add;
    all.tiles_size = tiles->tiles_size;
    all.pack_tiles = tiles->pack_tiles;
    all.tile_gemm = tiles->tile_gemm;
    all.tile_scratch = tiles->tile_scratch;
    memcpy(both, &all, sizeof all);
    return both;
}

static const fmha_kernels *emulated_kernels(void)
{
    static fmha_kernels both;
    return with_tiles("amx-emulated", &fmha_baseline_kernels_32, &fmha_amx_emulated_tile_kernels_32, &both);
}
#endif

#ifdef FMHA_X86
extern const fmha_kernels fmha_avx2_kernels_32, fmha_avx2_kernels_64, fmha_avx512_kernels_32, fmha_avx512_kernels_64;
extern const fmha_kernels fmha_avx512bf16_tile_kernels_32, fmha_amx_tile_kernels_32;

/* F16C, which every CPU with AVX2 is known to have; compilers differ in whether they can be asked for it. */
static int converts_halves(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}

static int multiplies_bfloat(void)
{
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);         /* AVX512-BF16 */
}

/* AMX asks three: the CPU, the operating system whether it saves tiles, and Linux for this process's permission to use them. */
static int tiles_run(void)
{
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1)) return 0;     /* AMX-BF16, AMX-TILE */
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return 0;                                /* xgetbv */
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low >> 17 & 3) != 3) return 0;
#ifdef __linux__
    enum { ASK_FOR_PERMISSION = 0x1023, OF_TILES = 18 };
    return syscall(SYS_arch_prctl, ASK_FOR_PERMISSION, OF_TILES) == 0;
#else
    return 0;       /* no system known to give them */
#endif
}

int fmha_isa_runs(fmha_isa isa)
{
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && converts_halves();
    int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw")
                 && __builtin_cpu_supports("avx512dq");
    if (isa == FMHA_AVX2) return avx2;
    if (isa == FMHA_AVX512) return avx512;
    if (isa == FMHA_AVX512BF16) return avx512 && multiplies_bfloat();
    if (isa == FMHA_AMX) return avx512 && multiplies_bfloat() && tiles_run();
    return isa == FMHA_BASELINE || isa == FMHA_AMX_EMULATED;
}

static void know_cpu(void)
{
    enum { ZEN4 = 25, ZEN5 = 26 };     /* families; Zen 3 is models of the former's */
    unsigned a, name[3];
    if (!__get_cpuid(0, &a, &name[0], &name[2], &name[1]) || memcmp(name, "AuthenticAMD", sizeof name) != 0) return;
    if (!__get_cpuid(1, &a, &name[0], &name[1], &name[2])) return;
    const unsigned family = (a >> 8 & 15) + (a >> 20 & 255), model = (a >> 4 & 15) | (a >> 12 & 0xF0);
    fmha_cpu_fetches = family >= ZEN5 || (family == ZEN4 && (model < 0x10 || (model >= 0x20 && model < 0x60)));
}

const fmha_kernels *fmha_kernels_of(fmha_isa isa, int is_double)
{
    know_cpu();
    if (isa == FMHA_AVX2) return is_double ? &fmha_avx2_kernels_64 : &fmha_avx2_kernels_32;
    if (isa == FMHA_AVX512) return is_double ? &fmha_avx512_kernels_64 : &fmha_avx512_kernels_32;
    if ((isa == FMHA_AVX512BF16 || isa == FMHA_AMX) && is_double) return &fmha_avx512_kernels_64;
    if (isa == FMHA_AVX512BF16) {
        static fmha_kernels both;
        return with_tiles("avx512bf16", &fmha_avx512_kernels_32, &fmha_avx512bf16_tile_kernels_32, &both);
    }
    if (isa == FMHA_AMX) {
        static fmha_kernels both;
        return with_tiles("amx", &fmha_avx512_kernels_32, &fmha_amx_tile_kernels_32, &both);
    }
    if (isa == FMHA_AMX_EMULATED && !is_double) return emulated_kernels();
    return is_double ? &fmha_baseline_kernels_64 : &fmha_baseline_kernels_32;
}
#elif defined(__GNUC__) || defined(__clang__)
int fmha_isa_runs(fmha_isa isa) { return isa == FMHA_BASELINE || isa == FMHA_AMX_EMULATED; }

const fmha_kernels *fmha_kernels_of(fmha_isa isa, int is_double)
{
    if (isa == FMHA_AMX_EMULATED && !is_double) return emulated_kernels();
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
    static const char *const names[FMHA_ISA_COUNT] = {"baseline", "avx2", "avx512", "avx512bf16", "amx", "amx-emulated"};
    return names[isa];
}
