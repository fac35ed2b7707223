# The CUDA backend: NIBBLE_CUDA compiles it with nvcc, NIBBLE_CUDA_EMULATED compiles the same kernels with the C++ compiler for
# tests without a GPU (src/backend/cuda/emulate.h). Sets nibble_cuda_objects, nibble_cuda_libraries, nibble_cuda_definitions.

set(NIBBLE_CUDA_ARCHITECTURES "80;89;90a;100a;120a" CACHE STRING "GPU architectures to compile for")

set(nibble_cuda_objects)
set(nibble_cuda_libraries)
set(nibble_cuda_definitions NBI_WITH_CUDA=0 NBI_CUDA_EMULATED=0)
if(NIBBLE_CUDA AND NIBBLE_CUDA_EMULATED)
    message(FATAL_ERROR "NIBBLE_CUDA and NIBBLE_CUDA_EMULATED exclude each other.")
endif()

if(NIBBLE_CUDA OR NIBBLE_CUDA_EMULATED)
    file(GLOB cuda_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/backend/cuda/*.cu
         ${PROJECT_SOURCE_DIR}/src/moe/cuda/*.cu)
    set(runtime ${PROJECT_SOURCE_DIR}/src/backend/cuda/runtime.cu)
    enable_language(CXX)
    if(NIBBLE_CUDA)
        set(CMAKE_CUDA_ARCHITECTURES ${NIBBLE_CUDA_ARCHITECTURES})
        # CMake 3.25 does not know which flag this compiler has for CUDA_STANDARD 20.
        set(CMAKE_CUDA_FLAGS_RELEASE "-std=c++20 -O3 -DNDEBUG -lineinfo")
        enable_language(CUDA)
        find_package(CUDAToolkit REQUIRED)
        set(nibble_cuda_libraries CUDA::cudart_static stdc++)
        set(nibble_cuda_definitions NBI_WITH_CUDA=1 NBI_CUDA_EMULATED=0)
    else()
        set(CMAKE_CXX_STANDARD 20)
        set(CMAKE_CXX_STANDARD_REQUIRED ON)
        set(CMAKE_CXX_EXTENSIONS OFF)
        list(REMOVE_ITEM cuda_sources ${runtime})
        set_source_files_properties(${cuda_sources} PROPERTIES LANGUAGE CXX COMPILE_OPTIONS "-xc++")
        list(APPEND cuda_sources ${PROJECT_SOURCE_DIR}/src/backend/cuda/emulate.cpp
             ${PROJECT_SOURCE_DIR}/src/backend/cuda/runtime_emulated.cpp)
        set(nibble_cuda_libraries stdc++)
        set(nibble_cuda_definitions NBI_WITH_CUDA=1 NBI_CUDA_EMULATED=1)
    endif()
    add_library(nibble_cuda OBJECT ${cuda_sources})
    set_target_properties(nibble_cuda PROPERTIES POSITION_INDEPENDENT_CODE ON
                          CXX_VISIBILITY_PRESET hidden CUDA_VISIBILITY_PRESET hidden)
    target_include_directories(nibble_cuda PRIVATE include src)
    target_compile_definitions(nibble_cuda PRIVATE _GNU_SOURCE)
    set(cuda_host_warnings -Wall -Wextra -Wshadow)
    if(NIBBLE_WERROR)
        list(APPEND cuda_host_warnings -Werror)
    endif()
    if(NIBBLE_CUDA)
        target_link_libraries(nibble_cuda PRIVATE CUDA::cudart_static)
        string(REPLACE ";" "," joined "${cuda_host_warnings}")
        target_compile_options(nibble_cuda PRIVATE -Xcompiler=${joined}
                               $<$<BOOL:${NIBBLE_WERROR}>:--Werror=all-warnings>)
    else()
        # Contraction as on the device is not reproduced: sums are compared with a bound.
        target_compile_options(nibble_cuda PRIVATE ${cuda_host_warnings} -Wno-unknown-pragmas
                               -ffp-contract=off -fno-math-errno -fno-trapping-math)
    endif()
    set(nibble_cuda_objects $<TARGET_OBJECTS:nibble_cuda>)
endif()
