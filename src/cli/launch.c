/* The launcher of the ranks of one host; launch.h explains it. */
#include "cli/launch.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/mem.h"
#include "comm/comm.h"

#define JOB_VARIABLE "NIBBLE_JOB" /* the socket's name; for the ranks of this program only */
#define TAIL_BYTES   8192u
/* When a rank is gone mpiexec waits so long, sends SIGTERM, waits again and kills the others: time
 * for rank 0 to tell its clients, on a busy machine, too. */
#define GRACE_SECONDS "1"
#define ORPHANS_MS    5000 /* for ranks to notice that mpiexec is gone */

enum fd { FD_SIGNALS, FD_SOCKET, FD_OUTPUT, FD_INPUT, N_FDS };

typedef struct launcher {
    const nbi_command *command;
    uint32_t n;
    pid_t mpiexec;
    struct pollfd fds[N_FDS];
    int to_rank0, from_input; /* the pipe of rank 0's standard input; -1 */
    pid_t ranks[NBI_RANKS_MAX];
    uint32_t n_ranks;
    char name[64];
    char tail[TAIL_BYTES]; /* of what mpiexec said */
    size_t n_tail;
    bool ended;
    int status; /* of waitpid */
} launcher;

typedef struct greeting {
    uint32_t rank;
    int32_t pid;
} greeting;

static socklen_t address(struct sockaddr_un *a, const char *name)
{
    *a = (struct sockaddr_un){.sun_family = AF_UNIX};
    snprintf(a->sun_path + 1, sizeof a->sun_path - 1, "%s", name); /* abstract: begins with NUL */
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(name));
}

uint32_t nbi_launch_ranks(void)
{
    const char *n = getenv("OMPI_COMM_WORLD_SIZE");
    return n ? (uint32_t)strtoul(n, NULL, 10) : 0;
}

bool nbi_launch_is_rank(void)
{
    const char *tasks = getenv("SLURM_NTASKS");
    if (nbi_launch_ranks()) return true;
    if (tasks && !strcmp(tasks, "1")) return false; /* a shell within a job */
    return getenv("PMIX_NAMESPACE") || getenv("PMI_RANK");
}

/* ---------------------------------------------------------------- on a rank */

/* Descriptors that the launcher sends: standard output, error and for rank 0 perhaps input. */
static int receive_fds(int s, int fds[3])
{
    char kinds[3];
    union {
        struct cmsghdr head;
        char space[CMSG_SPACE(3 * sizeof(int))];
    } control = {0};
    struct iovec data = {.iov_base = kinds, .iov_len = sizeof kinds};
    struct msghdr m = {.msg_iov = &data,
                       .msg_iovlen = 1,
                       .msg_control = control.space,
                       .msg_controllen = sizeof control.space};
    if (recvmsg(s, &m, MSG_CMSG_CLOEXEC) <= 0) return 0;
    const struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    if (!c || c->cmsg_type != SCM_RIGHTS || c->cmsg_len < CMSG_LEN(2 * sizeof(int))) return 0;
    int n = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    if (n > 3) n = 3;
    memcpy(fds, CMSG_DATA(c), (size_t)n * sizeof(int));
    return n;
}

nb_status nbi_launch_meet(uint32_t rank, nb_error *err)
{
    static const int targets[3] = {STDOUT_FILENO, STDERR_FILENO, STDIN_FILENO};
    const char *name = getenv(JOB_VARIABLE);
    struct sockaddr_un to;
    greeting g = {.rank = rank, .pid = (int32_t)getpid()};
    int fds[3] = {-1, -1, -1};
    if (!name) return NB_OK;
    socklen_t n_to = address(&to, name);
    int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    int n = 0;
    if (s >= 0 && connect(s, (struct sockaddr *)&to, n_to) == 0 &&
        write(s, &g, sizeof g) == (ssize_t)sizeof g)
        n = receive_fds(s, fds);
    fflush(stdout);
    for (int i = 0; i < n && i < 3; i++) {
        dup2(fds[i], targets[i]);
        close(fds[i]);
    }
    if (s >= 0) close(s);
    unsetenv(JOB_VARIABLE);
    return n ? NB_OK : nbi_fail(err, NB_IO, "rank %u does not reach its launcher", rank);
}

/* ---------------------------------------------------------------- the launcher */

static void send_fds(int s, const int *fds, size_t n)
{
    union {
        struct cmsghdr head;
        char space[CMSG_SPACE(3 * sizeof(int))];
    } control = {0};
    struct iovec data = {.iov_base = (char[]){"oei"}, .iov_len = n};
    struct msghdr m = {.msg_iov = &data,
                       .msg_iovlen = 1,
                       .msg_control = control.space,
                       .msg_controllen = CMSG_SPACE(n * sizeof(int))};
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(n * sizeof(int));
    memcpy(CMSG_DATA(c), fds, n * sizeof(int));
    (void)!sendmsg(s, &m, MSG_NOSIGNAL);
}

static void meet(launcher *l)
{
    greeting g;
    struct ucred who;
    socklen_t n = sizeof who;
    int s = accept4(l->fds[FD_SOCKET].fd, NULL, NULL, SOCK_CLOEXEC);
    if (s < 0) return;
    const struct timeval limit = {.tv_sec = 2};
    setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    bool ours = getsockopt(s, SOL_SOCKET, SO_PEERCRED, &who, &n) == 0 && who.uid == geteuid() &&
                read(s, &g, sizeof g) == (ssize_t)sizeof g && g.rank < l->n && !l->ranks[g.rank];
    if (ours) {
        const int fds[3] = {STDOUT_FILENO, STDERR_FILENO, l->from_input};
        l->ranks[g.rank] = who.pid;
        l->n_ranks++;
        send_fds(s, fds, g.rank == 0 && l->from_input >= 0 ? 3 : 2);
    }
    close(s);
}

/* Of mpiexec: to be shown only if it could not start the ranks. */
static void keep_output(launcher *l)
{
    char text[1024];
    ssize_t n = read(l->fds[FD_OUTPUT].fd, text, sizeof text);
    if (n <= 0) {
        l->fds[FD_OUTPUT].fd = -1;
        return;
    }
    size_t keep = l->n_tail + (size_t)n > TAIL_BYTES ? TAIL_BYTES - (size_t)n : l->n_tail;
    memmove(l->tail, l->tail + l->n_tail - keep, keep);
    memcpy(l->tail + keep, text, (size_t)n);
    l->n_tail = keep + (size_t)n;
}

static void pass_input(launcher *l)
{
    char text[4096];
    ssize_t n = read(STDIN_FILENO, text, sizeof text);
    for (ssize_t at = 0; at < n;) {
        ssize_t k = write(l->to_rank0, text + at, (size_t)(n - at));
        if (k <= 0) break;
        at += k;
    }
    if (n > 0) return;
    close(l->to_rank0);
    l->to_rank0 = -1;
    l->fds[FD_INPUT].fd = -1;
}

static void take_signal(launcher *l)
{
    struct signalfd_siginfo info;
    if (read(l->fds[FD_SIGNALS].fd, &info, sizeof info) != (ssize_t)sizeof info) return;
    const int number = (int)info.ssi_signo;
    if (number == SIGCHLD) {
        if (waitpid(l->mpiexec, &l->status, WNOHANG) == l->mpiexec) l->ended = true;
    } else if (l->ranks[0]) {
        kill(l->ranks[0], number);
    } else {
        kill(l->mpiexec, number == SIGHUP ? SIGTERM : number);
    }
}

static void run(launcher *l)
{
    while (!l->ended) {
        if (poll(l->fds, N_FDS, -1) < 0) continue;
        if (l->fds[FD_SOCKET].revents) meet(l);
        if (l->fds[FD_OUTPUT].revents) keep_output(l);
        if (l->fds[FD_INPUT].revents) pass_input(l);
        if (l->fds[FD_SIGNALS].revents) take_signal(l);
    }
    while (l->fds[FD_OUTPUT].fd >= 0 && poll(&l->fds[FD_OUTPUT], 1, 0) > 0) keep_output(l);
}

/* mpiexec was killed: its ranks notice; one that cannot is ended here. */
static void end_orphans(const launcher *l)
{
    for (int ms = 0; ms < ORPHANS_MS; ms += 50) {
        bool left = false;
        for (uint32_t r = 0; r < l->n; r++)
            left = left || (l->ranks[r] && kill(l->ranks[r], 0) == 0);
        if (!left) return;
        poll(NULL, 0, 50);
    }
    for (uint32_t r = 0; r < l->n; r++)
        if (l->ranks[r]) kill(l->ranks[r], SIGKILL);
}

/* ---------------------------------------------------------------- mpiexec */

/* Nothing of a job on one host needs a network or files. */
static const char **command_line(uint32_t n, char *number, char *program, char **argv)
{
    /* clang-format off */
    const char *const head[] = {
        "mpiexec", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-q",
        "-stdin", "none", "--mca", "plm", "isolated", "--mca", "ras", "simulator",
        "--mca", "pml", "ob1", "--mca", "btl", "self,tcp", "--mca", "btl_tcp_if_include", "lo",
        "--mca", "oob_tcp_if_include", "lo", "--mca", "odls_base_sigkill_timeout", GRACE_SECONDS,
        "-n", number, program};
    /* clang-format on */
    const size_t n_head = sizeof head / sizeof *head;
    size_t n_args = 0;
    while (argv[n_args]) n_args++;
    const char **line = nbi_calloc(n_head + n_args + 1, sizeof *line);
    if (!line) return NULL;
    snprintf(number, 16, "%u", n);
    memcpy(line, head, sizeof head);
    memcpy(line + n_head, argv, n_args * sizeof *line);
    return line;
}

static void become_mpiexec(const char **line, pid_t parent, const sigset_t *before, int output)
{
    static const char *const names[] = {"mpiexec.openmpi", "mpiexec"};
    setpgid(0, 0); /* Ctrl-C is for the launcher */
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent) _exit(EXIT_FAILURE);
    int nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
    dup2(nothing, STDIN_FILENO);
    dup2(output, STDOUT_FILENO);
    dup2(output, STDERR_FILENO);
    sigprocmask(SIG_SETMASK, before, NULL);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        execvp(names[i], (char *const *)(uintptr_t)line);
    fprintf(stderr, "mpiexec cannot be run (%s): install openmpi-bin\n", strerror(errno));
    _exit(EXIT_FAILURE);
}

static nb_status start(launcher *l, char **argv, bool input, nb_error *err)
{
    char program[4096] = "", number[16];
    struct sockaddr_un at;
    sigset_t set, before;
    int output[2], in[2] = {-1, -1};
    ssize_t n = readlink("/proc/self/exe", program, sizeof program - 1);
    if (n <= 0) return nbi_fail(err, NB_IO, "/proc/self/exe: %s", strerror(errno));
    snprintf(l->name, sizeof l->name, "nibble-job-%d", (int)getpid());
    socklen_t n_at = address(&at, l->name);
    int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (s < 0 || bind(s, (struct sockaddr *)&at, n_at) || listen(s, 64) ||
        pipe2(output, O_CLOEXEC) || (input && pipe2(in, O_CLOEXEC)))
        return nbi_fail(err, NB_IO, "cannot start ranks: %s", strerror(errno));
    sigemptyset(&set);
    const int numbers[] = {SIGINT, SIGTERM, SIGHUP, SIGCHLD, SIGUSR1, SIGUSR2};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) sigaddset(&set, numbers[i]);
    sigprocmask(SIG_BLOCK, &set, &before);
    signal(SIGPIPE, SIG_IGN);
    setenv(JOB_VARIABLE, l->name, 1);
    const char **line = command_line(l->n, number, program, argv);
    if (!line) return nbi_fail(err, NB_NO_MEMORY, "out of memory");
    const pid_t parent = getpid();
    l->mpiexec = fork();
    if (l->mpiexec == 0) become_mpiexec(line, parent, &before, output[1]);
    nbi_free(line);
    close(output[1]);
    if (l->mpiexec < 0) return nbi_fail(err, NB_IO, "cannot start mpiexec: %s", strerror(errno));
    const int fds[N_FDS] = {[FD_SIGNALS] = signalfd(-1, &set, SFD_CLOEXEC),
                            [FD_SOCKET] = s,
                            [FD_OUTPUT] = output[0],
                            [FD_INPUT] = input ? STDIN_FILENO : -1};
    for (int i = 0; i < N_FDS; i++) l->fds[i] = (struct pollfd){.fd = fds[i], .events = POLLIN};
    l->from_input = in[0];
    l->to_rank0 = in[1];
    return NB_OK;
}

int nbi_launch(const nbi_command *command, uint32_t n, char **argv, bool input)
{
    nb_error err;
    launcher *l = nbi_calloc(1, sizeof *l);
    if (!l) return NBI_EXIT_FAILED;
    *l = (launcher){.command = command, .n = n, .from_input = -1, .to_rank0 = -1};
    if (start(l, argv, input, &err) != NB_OK) {
        nbi_free(l);
        return nbi_cli_fail(command, &err);
    }
    run(l);
    const int status = l->status;
    if (WIFSIGNALED(status)) end_orphans(l);
    if (l->n_ranks < n) { /* the ranks have said nothing */
        fwrite(l->tail, 1, l->n_tail, stderr);
    }
    nbi_free(l);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
