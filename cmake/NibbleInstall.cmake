# make install: the program, the library with its header, the default model, manual pages, the service.

install(TARGETS nibble_shared LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        PUBLIC_HEADER DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
if(TARGET nibble)
    install(TARGETS nibble RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

# Relative to where the file lies, so that an installation can be moved.
file(RELATIVE_PATH pc_to_prefix ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
configure_file(${PROJECT_SOURCE_DIR}/cmake/nibble.pc.in ${CMAKE_BINARY_DIR}/nibble.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/nibble.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

if(EXISTS ${PROJECT_SOURCE_DIR}/models/glm5-tiny/config.json)
    install(DIRECTORY models/glm5-tiny DESTINATION ${CMAKE_INSTALL_DATADIR}/nibble/models)
endif()
file(GLOB man_pages CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/docs/man/*.1)
if(man_pages)
    install(FILES ${man_pages} DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
endif()

# Below the prefix, where systemd looks when that is /usr or /usr/local; written at installation, when the prefix is known. Options are
# the administrator's: an example beside them.
install(CODE "
    get_filename_component(NIBBLE_BINDIR \"\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_BINDIR}\" ABSOLUTE)
    configure_file(\"${PROJECT_SOURCE_DIR}/packaging/nibble.service.in\" \"${CMAKE_BINARY_DIR}/nibble.service\" @ONLY)")
install(FILES ${CMAKE_BINARY_DIR}/nibble.service DESTINATION lib/systemd/system)
install(FILES packaging/serve.conf DESTINATION ${CMAKE_INSTALL_DATADIR}/nibble)
