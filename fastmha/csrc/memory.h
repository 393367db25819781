/* Large scratch in large pages. */
#ifndef FMHA_MEMORY_H
#define FMHA_MEMORY_H

#include <stddef.h>
#include <stdint.h>

#ifdef __linux__
#include <sys/mman.h>
#endif

#define FMHA_LARGE_BYTES (1 << 22)      /* from which on NumPy asks for its arrays, too */

/* Asks for pages of 2 MB, where there are any, under so many bytes that nobody has touched. More than the allocator keeps comes
 * fresh from the system at each call: by pages of 4 KB that can take as long as what is computed there. Nothing depends on the
 * answer. */
static inline void fmha_ask_large_pages(void *memory, size_t bytes)
{
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const uintptr_t page = 4096, first = ((uintptr_t)memory + page - 1) & ~(page - 1), last = ((uintptr_t)memory + bytes) & ~(page - 1);
    if (memory && bytes >= FMHA_LARGE_BYTES) (void)madvise((void *)first, last - first, MADV_HUGEPAGE);
#else
    (void)memory;
    (void)bytes;
#endif
}

#endif
