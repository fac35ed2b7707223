/* Runs a function in a child process: for what must abort. Used by unit tests. */
#pragma once

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

/* The signal that ended the child; 0 when `f` returned. The child's stderr is dropped: its message
 * is expected. */
static inline int child_signal(void (*f)(void *arg), void *arg)
{
    pid_t pid = fork();
    if (pid < 0) return -1;
    if (pid == 0) {
        int null = open("/dev/null", O_WRONLY);
        if (null >= 0) dup2(null, 2);
        f(arg);
        _exit(0);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}
