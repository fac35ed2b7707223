/* What the files of the tool-call parser share. Private to src/text/tool_*.c.
 *
 * The parser keeps the text that is not yet decided in `in`, from `pos` on, and takes steps: each
 * looks at it in the present state and either consumes something or asks for more. A decision may
 * depend on the state and the bytes only, never on where a push ended: what is decided on a prefix
 * has to be what is decided on any longer text. That is why every look-ahead has a fixed length. */
#pragma once

#include "text/tool.h"
#include "text/tool_json.h"
#include "text/tool_schema.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_TOOL_NAME_MAX  128u
#define NBI_TOOL_KEY_MAX   1024u
#define NBI_TOOL_SPACE_MAX 256u /* white space next to a call that is dropped */
#define NBI_TOOL_HEAD_MAX                                                   \
    2048u /* bytes from an opening tag to the end of the name, and the like \
           */

typedef enum nbi_tool_state {
    NBI_TOOL_OUTSIDE,
    NBI_TOOL_START,      /* form json: nothing but white space so far */
    NBI_TOOL_LOOSE,      /* object with another order of members: held whole */
    NBI_TOOL_OBJ,        /* arguments are a JSON object that streams */
    NBI_TOOL_TAIL,       /* rest of the object around them */
    NBI_TOOL_AFTER,      /* closing tags may follow */
    NBI_TOOL_INSIDE,     /* tagged forms: between arguments */
    NBI_TOOL_JUNK,       /* tagged forms: text that does not belong, up to the next '<' */
    NBI_TOOL_VALUE,      /* tagged forms: behind the value's opening tag */
    NBI_TOOL_VALUE_TEXT, /* a string that streams */
    NBI_TOOL_VALUE_HELD, /* held until complete */
    NBI_TOOL_PLAIN       /* the rest is content */
} nbi_tool_state;

typedef enum nbi_tool_step { NBI_TOOL_MORE, NBI_TOOL_AGAIN } nbi_tool_step;

typedef struct nbi_tool_out { /* an item before its text has its place */
    nbi_tool_item item;
    size_t at;
} nbi_tool_out;

struct nbi_tool_parser {
    nbi_tool_form form;
    nbi_tool_options options;
    json_t *tools; /* owned reference or NULL */

    nbi_tool_state state;
    bool final, stopped; /* no more text comes; the model stopped by itself */
    nbi_buf in;
    size_t pos;     /* start of what is undecided */
    size_t scanned; /* bytes behind pos that need not be searched again (VALUE_HELD, LOOSE) */

    /* content */
    size_t space_run;  /* white space given out directly before pos */
    bool behind_call;  /* no content but white space since the last call */
    size_t loose_skip; /* LOOSE: bytes that are content if it is no call */

    /* the call that is open */
    bool open;
    uint32_t n_calls;
    const json_t *tool; /* its declaration, borrowed from tools; NULL */
    bool has_args,
        args_whole; /* something was given out; as one JSON object, which closes itself */
    nbi_tool_keys keys;
    char key[NBI_TOOL_KEY_MAX]; /* of the value that comes */
    size_t n_key;
    unsigned kinds;       /* of the value */
    bool as_json;         /* DSML string="false" */
    unsigned after_index; /* AFTER: next of the closing tags */
    nbi_tool_json json;
    nbi_buf scratch;

    /* output of this push */
    nbi_buf out;
    nbi_tool_out *outs;
    size_t n_outs, cap_outs;
    nbi_tool_item *items;
    size_t cap_items;
};

static inline bool nbi_tool_is_space(char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r');
}

/* White space at s; at most n. */
static inline size_t nbi_tool_spaces(const char *s, size_t n)
{
    size_t i = 0;
    while (i < n && nbi_tool_is_space(s[i])) i++;
    return i;
}

/* Is s[0, n) the beginning of `tag` (MAYBE), does it begin with it (YES), or neither (NO)? */
typedef enum nbi_tool_match { NBI_TOOL_NO, NBI_TOOL_MAYBE, NBI_TOOL_YES } nbi_tool_match;
nbi_tool_match nbi_tool_match_tag(const char *s, size_t n, const char *tag);

/* What stands at an opening tag. */
typedef enum nbi_tool_verdict {
    NBI_TOOL_HEAD_BAD, /* no call: its tag is content */
    NBI_TOOL_HEAD_MORE,
    NBI_TOOL_HEAD_TAGS,  /* a call, arguments in tags follow */
    NBI_TOOL_HEAD_OBJ,   /* a call, a JSON object follows: the arguments */
    NBI_TOOL_HEAD_EMPTY, /* a call without arguments, all of it */
    NBI_TOOL_HEAD_LOOSE  /* an object that has to be read whole; `used` is where it starts */
} nbi_tool_verdict;

typedef struct nbi_tool_head {
    const char *name; /* into the text */
    size_t n_name;
    size_t used; /* bytes of head */
    size_t tag;  /* bytes that are content when it is no call */
} nbi_tool_head;

/* tool_parser.c ------------------------------------------------------------------------------- */

/* What is undecided: *n bytes. */
const char *nbi_tool_rest(const nbi_tool_parser *p, size_t *n);
/* Moves pos over n bytes without output. */
void nbi_tool_skip(nbi_tool_parser *p, size_t n);
/* Gives out text as content. */
NBI_MUST_CHECK nb_status nbi_tool_content(nbi_tool_parser *p, const char *text, size_t n);
/* Gives out the next n undecided bytes as content. */
NBI_MUST_CHECK nb_status nbi_tool_content_rest(nbi_tool_parser *p, size_t n);
/* May a call of that name begin now? */
bool nbi_tool_name_ok(const nbi_tool_parser *p, const char *name, size_t n);
NBI_MUST_CHECK nb_status nbi_tool_begin(nbi_tool_parser *p, const char *name, size_t n);
/* What was written to p->out from `at` on are arguments. */
NBI_MUST_CHECK nb_status nbi_tool_args_end(nbi_tool_parser *p, size_t at);
NBI_MUST_CHECK nb_status nbi_tool_args(nbi_tool_parser *p, const char *text, size_t n);
/* Closes the arguments of the open call, and the call. */
NBI_MUST_CHECK nb_status nbi_tool_end(nbi_tool_parser *p, bool complete);
/* Begins the call that a head found at the first of the undecided bytes announces. */
NBI_MUST_CHECK nb_status nbi_tool_enter(nbi_tool_parser *p, nbi_tool_verdict verdict,
                                        const nbi_tool_head *head, size_t before);

/* tool_tagged.c: forms glm and dsml ------------------------------------------------------------ */

nbi_tool_verdict nbi_tool_tagged_head(const nbi_tool_parser *p, const char *s, size_t n,
                                      nbi_tool_head *head);
NBI_MUST_CHECK nb_status nbi_tool_tagged_step(nbi_tool_parser *p, nbi_tool_step *step);

/* tool_object.c: forms hermes, deepseek and json ----------------------------------------------- */

nbi_tool_verdict nbi_tool_object_head(const nbi_tool_parser *p, const char *s, size_t n,
                                      nbi_tool_head *head);
NBI_MUST_CHECK nb_status nbi_tool_object_step(nbi_tool_parser *p, nbi_tool_step *step);

#ifdef __cplusplus
}
#endif
