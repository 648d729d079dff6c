from target_service.app import main

main()
