# Options, warnings and sanitizers. nibble_target(T) applies them to a target.

option(NIBBLE_WERROR "Treat warnings as errors" OFF)
option(NIBBLE_TESTS "Build the tests" ON)
option(NIBBLE_FUZZ "Build fuzz targets with libFuzzer (needs clang)" OFF)
option(NIBBLE_WITH_PYTHON "Render chat templates with Jinja2 in an embedded Python" ON)
option(NIBBLE_CUDA "Build the CUDA backend (needs nvcc)" OFF)
option(NIBBLE_CUDA_EMULATED "Build the CUDA backend for the CPU, block by block: for tests" OFF)
option(NIBBLE_WITH_CUTLASS "Build the MoE runner cutlass (needs CUTLASS: scripts/setup cutlass)" OFF)
set(NIBBLE_SANITIZE "" CACHE STRING "Sanitizers, e.g. address,undefined or thread")

if(NOT CMAKE_BUILD_TYPE)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()
if(NOT CMAKE_SYSTEM_NAME STREQUAL "Linux")
    message(FATAL_ERROR "nibble runs on Linux; this is ${CMAKE_SYSTEM_NAME}.")
endif()

set(CMAKE_C_STANDARD 11)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS OFF)
set(CMAKE_C_VISIBILITY_PRESET hidden)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
# -g1: line numbers in backtraces and profiles at little cost in size.
set(CMAKE_C_FLAGS_RELEASE "-O3 -DNDEBUG -g1")
set(CMAKE_C_FLAGS_DEBUG "-O1 -g -fno-omit-frame-pointer")
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR})
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR})

find_program(CCACHE ccache)
if(CCACHE AND NOT CMAKE_C_COMPILER_LAUNCHER)
    set(CMAKE_C_COMPILER_LAUNCHER ${CCACHE})
endif()

set(nibble_sanitize_flags)
if(NIBBLE_SANITIZE)
    list(APPEND nibble_sanitize_flags -fsanitize=${NIBBLE_SANITIZE} -fno-sanitize-recover=all)
    add_compile_options(${nibble_sanitize_flags})
    add_link_options(${nibble_sanitize_flags})
endif()
if(NIBBLE_FUZZ)
    if(NOT CMAKE_C_COMPILER_ID MATCHES "Clang")
        message(FATAL_ERROR "NIBBLE_FUZZ needs clang: configure with the preset \"fuzz\" or "
                "CC=clang; this is ${CMAKE_C_COMPILER_ID}.")
    endif()
    add_compile_options(-fsanitize=fuzzer-no-link)
endif()

# Warnings that hold for every file. -Wconversion without -Wsign-conversion: index arithmetic around intrinsics mixes int and
# size_t where the values are known.
set(nibble_warnings
    -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion -Wvla -Wundef
    -Wstrict-prototypes -Wmissing-prototypes -Wold-style-definition -Wwrite-strings -Wpointer-arith
    -Wcast-qual -Wformat=2 -Wdouble-promotion -Wimplicit-fallthrough -Wnull-dereference)
if(CMAKE_C_COMPILER_ID STREQUAL "GNU")
    # Cutting long sentences is what snprintf is used for.
    # "Maybe uninitialized" cannot see that a failing call leaves its out-parameter alone; clang's analyzer can.
    list(APPEND nibble_warnings -Wlogical-op -Wduplicated-cond -Wno-format-truncation
         -Wno-maybe-uninitialized)
    # Its analysis of flow and of constants is only sound enough without sanitizer code in between.
    if(NIBBLE_SANITIZE)
        list(APPEND nibble_warnings -Wno-null-dereference -Wno-conversion)
    endif()
endif()

if(CMAKE_C_COMPILER_ID MATCHES "Clang")
    # NB_ASSERT(!"sentence") is meant; clang counts floats handed to printf as promotions, and
    # vsnprintf in a wrapper as a format of unknown origin.
    list(APPEND nibble_warnings -Wno-string-conversion -Wno-double-promotion
         -Wno-format-nonliteral)
endif()

function(nibble_target target)
    target_compile_definitions(${target} PRIVATE _GNU_SOURCE)
    if(NIBBLE_SANITIZE)
        target_compile_definitions(${target} PRIVATE NBI_FAULTS=1) # see heap.c
    endif()
    target_compile_options(${target} PRIVATE ${nibble_warnings} -fno-math-errno -fno-trapping-math
                           -fno-semantic-interposition)
    if(NIBBLE_WERROR)
        target_compile_options(${target} PRIVATE -Werror)
    endif()
endfunction()
