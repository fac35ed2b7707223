# Libraries from the distribution, through pkg-config. nibble_deps carries what the core needs.

find_package(PkgConfig REQUIRED)
find_package(Threads REQUIRED)

function(nibble_need prefix module package)
    pkg_check_modules(${prefix} IMPORTED_TARGET GLOBAL QUIET ${module})
    if(NOT ${prefix}_FOUND)
        message(FATAL_ERROR "${module} is missing: run scripts/setup, or install ${package}.")
    endif()
endfunction()

nibble_need(JANSSON jansson libjansson-dev)
nibble_need(PCRE2 libpcre2-8 libpcre2-dev)
nibble_need(UTF8PROC libutf8proc libutf8proc-dev)
nibble_need(MICROHTTPD libmicrohttpd libmicrohttpd-dev)
# Certificates that are read again while the server runs: libmicrohttpd's own options only take them at its start. Its package
# brings this one along.
nibble_need(GNUTLS gnutls libgnutls28-dev)
# Headers only: the library is opened when `nibble bench serve` runs (src/perf/curl_api.h).
nibble_need(CURL libcurl libcurl4-openssl-dev)
# Headers only: opened when `nibble doctor` runs (src/perf/library.h). PCI capabilities out of configuration space; which CPUs a
# device is near to, and kinds of cores.
nibble_need(PCI libpci libpci-dev)
nibble_need(HWLOC hwloc libhwloc-dev)
# Headers only: opened when ranks are asked for (src/comm/mpi/mpi_api.h).
pkg_check_modules(OMPI IMPORTED_TARGET GLOBAL QUIET ompi-c)
set(with_mpi 0)
if(OMPI_FOUND)
    set(with_mpi 1)
else()
    message(STATUS "libopenmpi-dev not found: --tp-size will be refused with a reason")
endif()
if(NIBBLE_TESTS)
    nibble_need(CMOCKA cmocka libcmocka-dev)
endif()

add_library(nibble_deps INTERFACE)
target_link_libraries(nibble_deps INTERFACE PkgConfig::JANSSON PkgConfig::PCRE2
                      PkgConfig::UTF8PROC Threads::Threads m ${CMAKE_DL_LIBS})

# The system's Python (Jinja2 comes from the distribution), never one that PATH happens to name.
set(with_python 0)
if(NIBBLE_WITH_PYTHON)
    pkg_check_modules(PYTHON_EMBED IMPORTED_TARGET GLOBAL QUIET python3-embed)
    if(PYTHON_EMBED_FOUND)
        target_link_libraries(nibble_deps INTERFACE PkgConfig::PYTHON_EMBED)
        set(with_python 1)
    else()
        message(STATUS "python3-dev not found: chat templates will be refused with a reason")
    endif()
endif()
target_compile_definitions(nibble_deps INTERFACE NBI_WITH_PYTHON=${with_python}
                           NBI_WITH_MPI=${with_mpi})
