# The CUDA backend: NIBBLE_CUDA compiles it with nvcc, NIBBLE_CUDA_EMULATED compiles the same kernels with the C++ compiler for
# tests without a GPU (src/backend/cuda/emulate.h). Sets nibble_cuda_objects, nibble_cuda_libraries, nibble_cuda_definitions.

set(NIBBLE_CUDA_ARCHITECTURES "80;89;90a;100a;120a" CACHE STRING "GPU architectures to compile for")

set(nibble_cuda_objects)
set(nibble_cuda_libraries)
set(nibble_cuda_definitions NBI_WITH_CUDA=0 NBI_CUDA_EMULATED=0 NBI_WITH_CUTLASS=0)
if(NIBBLE_CUDA AND NIBBLE_CUDA_EMULATED)
    message(FATAL_ERROR "NIBBLE_CUDA and NIBBLE_CUDA_EMULATED exclude each other.")
endif()

if(NIBBLE_CUDA OR NIBBLE_CUDA_EMULATED)
    file(GLOB cuda_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/backend/cuda/*.cu
         ${PROJECT_SOURCE_DIR}/src/moe/cuda/*.cu)
    # The runner that multiplies through CUTLASS; emulated, a plain product stands in for it.
    set(cutlass_sources ${PROJECT_SOURCE_DIR}/src/moe/cuda/moe_cutlass.cu
        ${PROJECT_SOURCE_DIR}/src/moe/cuda/moe_cutlass_gemm.cu)
    list(REMOVE_ITEM cuda_sources ${cutlass_sources})
    set(runtime ${PROJECT_SOURCE_DIR}/src/backend/cuda/runtime.cu)
    enable_language(CXX)
    if(NIBBLE_CUDA)
        set(CMAKE_CUDA_ARCHITECTURES ${NIBBLE_CUDA_ARCHITECTURES})
        # CMake 3.25 does not know which flag this compiler has for CUDA_STANDARD 20.
        set(CMAKE_CUDA_FLAGS_RELEASE "-std=c++20 -O3 -DNDEBUG -lineinfo")
        enable_language(CUDA)
        find_package(CUDAToolkit REQUIRED)
        set(nibble_cuda_libraries CUDA::cudart_static stdc++)
        set(nibble_cuda_definitions NBI_WITH_CUDA=1 NBI_CUDA_EMULATED=0
            NBI_WITH_CUTLASS=$<BOOL:${NIBBLE_WITH_CUTLASS}>)
    else()
        set(CMAKE_CXX_STANDARD 20)
        set(CMAKE_CXX_STANDARD_REQUIRED ON)
        set(CMAKE_CXX_EXTENSIONS OFF)
        list(REMOVE_ITEM cuda_sources ${runtime})
        list(APPEND cuda_sources ${cutlass_sources})
        set_source_files_properties(${cuda_sources} PROPERTIES LANGUAGE CXX COMPILE_OPTIONS "-xc++")
        list(APPEND cuda_sources ${PROJECT_SOURCE_DIR}/src/backend/cuda/emulate.cpp
             ${PROJECT_SOURCE_DIR}/src/backend/cuda/runtime_emulated.cpp)
        set(nibble_cuda_libraries stdc++)
        set(nibble_cuda_definitions NBI_WITH_CUDA=1 NBI_CUDA_EMULATED=1 NBI_WITH_CUTLASS=1)
    endif()
    set(cuda_targets nibble_cuda)
    add_library(nibble_cuda OBJECT ${cuda_sources})
    if(NIBBLE_CUDA AND NIBBLE_WITH_CUTLASS)
        # Below an environment of Python, where "scripts/setup cutlass" leaves them.
        file(GLOB cutlass_found ${PROJECT_SOURCE_DIR}/build/cutlass/lib/python3*/site-packages/cutlass_library/source/include)
        find_path(NIBBLE_CUTLASS_INCLUDE cutlass/gemm/kernel/default_gemm_grouped.h HINTS ${cutlass_found}
                  DOC "Headers of CUTLASS")
        if(NOT NIBBLE_CUTLASS_INCLUDE)
            message(FATAL_ERROR "NIBBLE_WITH_CUTLASS: no headers of CUTLASS here. \"scripts/setup cutlass\" fetches them; "
                    "-DNIBBLE_CUTLASS_INCLUDE=FOLDER names those of another place.")
        endif()
        add_library(nibble_cutlass OBJECT ${cutlass_sources})
        target_include_directories(nibble_cutlass SYSTEM PRIVATE ${NIBBLE_CUTLASS_INCLUDE})
        target_compile_options(nibble_cutlass PRIVATE --expt-relaxed-constexpr)
        list(APPEND cuda_targets nibble_cutlass)
    endif()
    set_target_properties(${cuda_targets} PROPERTIES POSITION_INDEPENDENT_CODE ON
                          CXX_VISIBILITY_PRESET hidden CUDA_VISIBILITY_PRESET hidden)
    set(cuda_host_warnings -Wall -Wextra -Wshadow)
    if(NIBBLE_WERROR)
        list(APPEND cuda_host_warnings -Werror)
    endif()
    foreach(target ${cuda_targets})
        target_include_directories(${target} PRIVATE include src)
        target_compile_definitions(${target} PRIVATE _GNU_SOURCE)
        if(NIBBLE_CUDA)
            target_link_libraries(${target} PRIVATE CUDA::cudart_static)
            string(REPLACE ";" "," joined "${cuda_host_warnings}")
            target_compile_options(${target} PRIVATE -Xcompiler=${joined}
                                   $<$<BOOL:${NIBBLE_WERROR}>:--Werror=all-warnings>)
        else()
            # Contraction as on the device is not reproduced: sums are compared with a bound.
            target_compile_options(${target} PRIVATE ${cuda_host_warnings} -Wno-unknown-pragmas
                                   -ffp-contract=off -fno-math-errno -fno-trapping-math)
        endif()
        list(APPEND nibble_cuda_objects $<TARGET_OBJECTS:${target}>)
    endforeach()
endif()
