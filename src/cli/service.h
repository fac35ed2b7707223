/* Words to a service manager that waits for them (systemd, Type=notify). */
#pragma once

#ifdef __cplusplus
extern "C" {
#endif

/* Sends assignments such as "READY=1\nSTATUS=serving" to the socket in NOTIFY_SOCKET; does nothing
 * where there is none. A manager that does not listen is no error. */
void nbi_service_say(const char *assignments);

#ifdef __cplusplus
}
#endif
