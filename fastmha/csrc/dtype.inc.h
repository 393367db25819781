/* One dtype of one instruction set: vocabulary, algorithms, table. */
#include "vec.inc.h"
#include "stored.inc.h"
#include "dropout.inc.h"
#include "rows.inc.h"
#include "activation.inc.h"
#include "norm.inc.h"
#include "product.inc.h"
#include "scores.inc.h"
#include "block.inc.h"
#include "gathered.inc.h"
#include "mask.inc.h"
#include "forward.inc.h"
#include "forward_items.inc.h"
#if FMHA_TILES
#include "matrix.inc.h"
#include "matrix_forward.inc.h"
#endif
#include "backward.inc.h"
#if FMHA_TILES
#include "matrix_backward.inc.h"
#endif
#include "backward_items.inc.h"
#include "mask_gradient.inc.h"
#include "decode_passes.inc.h"
#include "decode.inc.h"
#include "decode_neighbours.inc.h"
#include "gemm.inc.h"
#if FMHA_TILES
#include "matrix_gemm.inc.h"
#endif

#if FMHA_TILES
/* All else is another table's. */
const fmha_kernels FMHA_NAME(tile_kernels) = {
    .matrix_head = FMHA_NAME(matrix_head),
    .matrix_pack = FMHA_NAME(matrix_pack),
    .matrix_bytes = FMHA_NAME(matrix_bytes),
    .matrix_cut = FMHA_NAME(matrix_cut),
    .matrix_forward = FMHA_NAME(matrix_forward),
    .matrix_scratch = FMHA_NAME(matrix_scratch),
    .gradient_pack_keys = FMHA_NAME(gradient_pack_keys),
    .gradient_pack_rows = FMHA_NAME(gradient_pack_rows),
    .gradient_bytes = FMHA_NAME(gradient_bytes),
    .matrix_backward = FMHA_NAME(matrix_backward),
    .gradient_scratch = FMHA_NAME(gradient_scratch),
    .gradient_kept = FMHA_NAME(backward_kept),
    .gradient_sums = FMHA_NAME(copy_sums),
    .gradient_add = FMHA_NAME(add_copies),
    .tiles_size = FMHA_NAME(tiles_size),
    .pack_tiles = FMHA_NAME(pack_tiles),
    .tile_gemm = FMHA_NAME(tile_gemm),
    .tile_scratch = FMHA_NAME(tile_scratch),
};
#else
const fmha_kernels FMHA_NAME(kernels) = {
    .name = FMHA_STRING(FMHA_ISA),
    .vector_bytes = FMHA_VECTOR_BYTES,
    .softmax = FMHA_NAME(softmax),
    .softmax_backward = FMHA_NAME(softmax_backward),
    .attend_rows = FMHA_NAME(attend_rows),
    .attend_rows_backward = FMHA_NAME(attend_rows_backward),
    .drop_rows = FMHA_NAME(drop_rows),
    .divide_rows = FMHA_NAME(divide_rows),
    .all_finite = FMHA_NAME(all_finite),
    .copy_rows = FMHA_NAME(copy_rows),
    .load_rows = FMHA_NAME(load_rows),
    .store_rows = FMHA_NAME(store_rows),
    .copy_finite = FMHA_NAME(copy_finite),
    .multiply = FMHA_NAME(multiply),
    .add_nonfinite = FMHA_NAME(add_nonfinite),
    .exceeds = FMHA_NAME(exceeds),
    .tiny_row = FMHA_NAME(tiny_row),
    .nonzero = FMHA_NAME(nonzero),
    .lift_rows = FMHA_NAME(lift_rows),
    .lower_row = FMHA_NAME(lower_row),
    .tiled_forward = FMHA_NAME(tiled_forward),
    .tiled_scratch = FMHA_NAME(tiled_scratch),
    .run_scratch = FMHA_NAME(run_scratch),
    .tiled_merge = FMHA_NAME(tiled_merge),
    .tiled_weights = FMHA_NAME(tiled_weights),
    .tiled_backward = FMHA_NAME(tiled_backward),
    .backward_scratch = FMHA_NAME(backward_scratch),
    .backward_kept = FMHA_NAME(backward_kept),
    .copy_sums = FMHA_NAME(copy_sums),
    .add_copies = FMHA_NAME(add_copies),
    .mask_gradient = FMHA_NAME(mask_gradient),
    .mask_gradient_scratch = FMHA_NAME(mask_gradient_scratch),
    .decode = FMHA_NAME(decode),
    .decode_scratch = FMHA_NAME(decode_item_scratch),
    .decode_neighbours = FMHA_NAME(decode_neighbours),
    .neighbours_scratch = FMHA_NAME(neighbours_scratch),
    .chunk_scratch = FMHA_NAME(chunk_scratch),
    .decode_merge = FMHA_NAME(decode_merge),
    .merge_scratch = FMHA_NAME(merge_scratch),
    .gemm = FMHA_NAME(gemm),
    .gemm_pack = FMHA_NAME(gemm_pack),
    .gemm_scratch = FMHA_NAME(gemm_scratch),
    .finish = FMHA_NAME(finish),
    .activate_row = FMHA_NAME(activate_row),
    .activate_row_backward = FMHA_NAME(activate_row_backward),
    .norm_rows = FMHA_NAME(norm_rows),
    .norm_rows_backward = FMHA_NAME(norm_rows_backward),
    .add_up_rows = FMHA_NAME(add_up_rows),
    .exponential = FMHA_NAME(exponential),
    .hyperbolic_tangent = FMHA_NAME(hyperbolic_tangent),
};
#endif

#undef REAL
#undef INT
#undef REAL_LOG
#undef REAL_ABS
#undef REAL_EPSILON
#undef SIGN_BIT
#undef EXP_SHIFT
#undef EXP_BIAS
#undef EXP_MAGIC
#undef EXP_LOW
#undef EXP_NORMAL
#undef EXP_ZERO
#undef EXP_MOST
#undef POWER
#undef LARGE_POWER
#undef HUGE_POWER
#undef SUBNORMAL_LIFT
#undef LARGEST
#undef SMALLEST_NORMAL
#undef LARGEST_CAP
#undef TINY
#undef TANH_NEAR
#undef LSE_ROUNDINGS
#undef EXP_HIGH
#undef LOG2_E
#undef LN2_HIGH
#undef LN2_LOW
#undef NEGATIVE_INFINITY
#undef LANES
#undef LANE_NUMBERS
#undef HAVE_FOURS
#undef BY_FOURS
#undef MOST_KEYS
#undef FOUR_VECTORS
#undef FOUR_KEYS
#undef HAVE_SHUFFLES
#undef BIT
#undef SHUFFLED_LANE
#undef TWO_LANES
#undef FOUR_LANES
#undef EIGHT_LANES
#undef ALL_LANES
#undef SHUFFLED
#undef WIDES
#undef WIDE
#undef w_splat
#undef w_lane
#undef w_product
#undef WORD
#undef PARTS
#undef EXACT_DISTANCE
#undef VEC
#undef BLOCK_VECTORS
#undef KEY_STEP
#undef MASK_KEYS
#undef GRANULE
#undef LINE
#undef BLOCK_LD
#undef MICRO_ROWS
#undef MICRO_AT
#undef MICRO
#undef MICRO_LAST
#undef PRODUCT
#undef BY_STORED
#undef MICRO_PANEL
#undef DECODE_ABREAST
#undef DECODE_LAST
#undef DECODE_VECTORS
#undef DECODE_ALL
#undef STORED_PARTS
#undef STORED_HALVES_IN_PARTS
#undef HALVES_CONVERTED
#undef IVEC
#undef v_load
#undef v_store
#undef v_splat
#undef i_splat
#undef v_bits
#undef v_from_bits
#undef i_load
#undef v_lane
#undef i_within
#undef v_truth
#undef v_select
#undef v_greater
#undef v_equal
#undef i_greater
#undef v_max
#undef v_min
#undef v_round
#undef v_round_up
#undef v_scale
#undef v_fma
#undef v_fms
#undef v_sum
#undef EACH
#undef ABREAST
#undef X86_OP
#undef ARM_OP
#undef X86_PASTE
#undef X86_PASTE_
#undef X86_PREFIX
#undef HAVE_TRANSPOSE
#undef v_prefetch
#undef v_prefetch_written
#undef v_prefetch_far
#undef v_any
#undef v_abs
#undef v_load_n
#undef v_store_n
