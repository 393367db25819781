/* What masks of the keys alone, as of padding, leave of them: a range is worth more than a mask, since what lies beside it is
 * not computed, and in it nothing is looked up. */
#include "fastmha.h"

#include <string.h>

static int none_removed(const char *mask, ptrdiff_t step, ptrdiff_t first, ptrdiff_t last)
{
    char some = 0;
    if (step == 1)
        for (ptrdiff_t j = first; j < last; j++) some |= mask[j];
    else
        for (ptrdiff_t j = first; j < last; j++) some |= mask[j * step];
    return !some;
}

int fmha_mask_ranges(const fmha_problem *p, ptrdiff_t size, const void *removed, int64_t *starts, int64_t *ends)
{
    const fmha_array *boolean = &p->bool_mask, *additive = &p->additive_mask;
    int whole = 1;
    for (ptrdiff_t b = 0; b < p->B; b++) {
        ptrdiff_t first, last;
        fmha_valid_keys(p, b, &first, &last);
        if (fmha_of_keys(boolean)) {
            const char *m = boolean->data + b * boolean->stride[0];
            const ptrdiff_t step = boolean->stride[3];
            while (first < last && m[first * step]) first++;
            while (last > first && m[(last - 1) * step]) last--;
            whole &= none_removed(m, step, first, last);
        }
        if (fmha_of_keys(additive)) {
            const char *m = additive->data + b * additive->stride[0] * size;
            const ptrdiff_t step = additive->stride[3] * size;
            while (first < last && !memcmp(m + first * step, removed, (size_t)size)) first++;
            while (last > first && !memcmp(m + (last - 1) * step, removed, (size_t)size)) last--;
        }
        starts[b] = first;
        ends[b] = last;
    }
    return whole;
}
