from target_service.service import main

main()
