/* The build id, from the notes that the linker left. Callers: files that hold for one build only.
 */
#include "base/build.h"

#include <elf.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#define ID_BYTES 20u

static char text[sizeof NB_VERSION + 1 + 2 * ID_BYTES + 1];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void write_id(const uint8_t *id, size_t n)
{
    size_t at = strlen(text);
    text[at++] = '+';
    for (size_t i = 0; i < n && i < ID_BYTES; i++, at += 2)
        snprintf(text + at, sizeof text - at, "%02x", id[i]);
}

/* Notes are a header of three words, a name and a content, both padded to whole words. */
static bool find_note(const char *at, size_t bytes)
{
    while (bytes >= sizeof(ElfW(Nhdr))) {
        ElfW(Nhdr) h;
        memcpy(&h, at, sizeof h);
        const size_t name = (h.n_namesz + 3u) & ~(size_t)3, id = (h.n_descsz + 3u) & ~(size_t)3;
        if (bytes < sizeof h + name + id) return false;
        if (h.n_type == NT_GNU_BUILD_ID && h.n_namesz == 4 && !memcmp(at + sizeof h, "GNU", 4)) {
            write_id((const uint8_t *)at + sizeof h + name, h.n_descsz);
            return true;
        }
        at += sizeof h + name + id;
        bytes -= sizeof h + name + id;
    }
    return false;
}

static bool holds(const struct dl_phdr_info *o, uintptr_t address)
{
    for (unsigned i = 0; i < o->dlpi_phnum; i++) {
        const uintptr_t begin = o->dlpi_addr + o->dlpi_phdr[i].p_vaddr;
        if (o->dlpi_phdr[i].p_type == PT_LOAD && address >= begin &&
            address - begin < o->dlpi_phdr[i].p_memsz)
            return true;
    }
    return false;
}

static int look(struct dl_phdr_info *o, size_t bytes, void *user)
{
    (void)bytes, (void)user;
    if (!holds(o, (uintptr_t)text)) return 0;
    for (unsigned i = 0; i < o->dlpi_phnum; i++) {
        const ElfW(Phdr) *p = &o->dlpi_phdr[i];
        if (p->p_type != PT_NOTE) continue;
        /* an address that the loader gives as a number */
        const char *notes = (const char *)(o->dlpi_addr + p->p_vaddr); /* NOLINT */
        if (find_note(notes, p->p_memsz)) break;
    }
    return 1;
}

static void find(void)
{
    snprintf(text, sizeof text, "%s", NB_VERSION);
    dl_iterate_phdr(look, NULL);
}

const char *nbi_build_id(void)
{
    pthread_once(&once, find);
    return text;
}
